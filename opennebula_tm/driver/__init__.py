"""What the driver scripts on the front end do."""
