"""Judging what a stage computed: the rules, and what several stages record by them."""
