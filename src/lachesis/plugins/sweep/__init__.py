"""Several runs of one configuration with different keys, one after the other, and a page that compares them."""
