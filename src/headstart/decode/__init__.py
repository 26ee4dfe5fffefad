"""Draft, verify, commit: the decode loop, its verifiers, drafters and budgets."""
