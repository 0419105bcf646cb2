"""What a disk of ours says of itself by SCSI."""

MAKER, MODEL = "LIO-ORG", "virtman-"
"""Its vendor, and how its product begins (SPC-4, standard INQUIRY data)."""
