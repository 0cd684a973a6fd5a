"""The generated pages of docs/, and the settings of the site."""
