"""Draft, verify, commit: the decode loop, its verification rules and its budget."""
