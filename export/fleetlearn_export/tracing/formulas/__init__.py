"""Formulas recorded in place of operators, before automatic differentiation, which then
differentiates the formulas."""
