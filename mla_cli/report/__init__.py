"""What commands did, for people: figures as text, charts as SVG and PNG, one HTML page."""
