"""What needs processes of its own: started, killed, hung, out of disk."""
