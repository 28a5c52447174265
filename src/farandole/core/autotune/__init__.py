"""The settings that change while a job runs, and the search for good ones."""
