"""A schema of a site's table, in parts: rows about patients, of whom some died."""

OUTCOME = """[label]
column = "outcome"
classes = ["alive", "dead"]
"""
AGE = """[[columns]]
name = "age"
type = "number"
mean = 50
scale = 10
range = [0, 100]
"""
SEX = """[[columns]]
name = "sex"
type = "category"
values = ["f", "m"]
"""
