"""Commands for files and scripts of other trainers."""
