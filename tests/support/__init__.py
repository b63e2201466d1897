"""What tests share: builders that know nothing of the code under test."""
