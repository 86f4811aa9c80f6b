"""Parts of tests, which import nothing of each other."""
