"""Puts the patch series and our modules into an installed Nova, says whether they are there, and takes them out."""
