"""Plugins that were written for API level 4, served until level 6: decision 24. Nothing else imports from here."""
