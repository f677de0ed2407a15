"""Object stores, and what else comes from elsewhere.

Lives here: one small class over s3://, gs://, r2:// and folders; signatures; the record of attempts; the
hub's files.
In: a URL and bytes. Out: objects, or StorageError once what may pass has been tried again.
May import: obstore, `trainer.config` and below.
"""
