"""The template's card and backend as they were at API level 4; codes and products are the template's own."""
