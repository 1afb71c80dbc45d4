"""What any program needs: files, texts, processes."""
