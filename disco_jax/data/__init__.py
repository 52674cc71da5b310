"""Image-text data: sources of examples, and batches made from them."""
