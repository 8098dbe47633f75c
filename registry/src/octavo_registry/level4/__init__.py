"""Plugins that were written for API level 4, served until level 6: decision 25. Nothing else imports from here."""
