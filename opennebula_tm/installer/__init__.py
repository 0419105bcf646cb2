"""Puts the drivers into an OpenNebula front end, lets its user reach the agents of hosts, and takes both back."""
