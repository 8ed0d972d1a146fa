"""Who may connect to a job, and with what: passwords, certificates, invitations."""
