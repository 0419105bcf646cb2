"""What both ends of iSCSI share."""
