"""What a folder holds, counted, grouped and measured: the data behind `inspect`, its pictures and `diff`."""
