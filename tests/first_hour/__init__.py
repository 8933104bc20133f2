"""What somebody meets in the first hour with the package."""
