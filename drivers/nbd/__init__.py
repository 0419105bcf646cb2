"""What both ends of NBD share."""
