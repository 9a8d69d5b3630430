"""Allocators against recordings, references and their contract."""
