"""Long checks that are commands of their own, outside CI."""
