"""Jobs on other machines: launched, looked after, brought home, given back."""
