"""Checks of PEFT's and transformers' further functions: several adapters, layouts over devices, wrapped models."""
