class Subject: pass
