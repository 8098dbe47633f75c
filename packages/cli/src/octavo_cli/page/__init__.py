"""Self-contained HTML pages: charts that can be hovered and zoomed, tables that fit a phone, nothing fetched."""
