"""Drop-ins: the calls of other projects, on top of this one."""
