"""VirtMan in OpenStack: a patch series for an installed Nova, modules that it uses, and the tool for both."""
