"""What ranks do in the tests of experts that are spread over them: importable by name, as other processes run it."""
