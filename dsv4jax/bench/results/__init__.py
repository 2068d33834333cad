"""Result files, their tables and plots, pages, and comparisons of two runs."""
