"""Backends over AMD's kernel libraries."""
