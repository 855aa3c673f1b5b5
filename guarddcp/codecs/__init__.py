"""Codecs: `ratio` for certified moment pairs, `exact` for everything else. NOTES.md says what each gives."""
