"""The client side of inference servers: HTTP requests out, records or errors back."""
