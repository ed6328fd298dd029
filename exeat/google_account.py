"""A key file of a Google service account that is good for nothing: Google's SDKs refuse to start without one.

Its key is made here and thrown away; its `token_uri` is a stub endpoint (decision 15), which looks at no signature.
"""

from __future__ import annotations

import json

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

VARIABLE = "GOOGLE_APPLICATION_CREDENTIALS"
EMAIL = "sandbox@exeat.invalid"


def throw_away_account(token_uri: str) -> str:
    """The JSON text. About a tenth of a second."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode("ascii")
    account = {
        "type": "service_account",
        "project_id": "exeat",
        "private_key_id": "placeholder",
        "private_key": pem,
        "client_email": EMAIL,
        "client_id": "0",
        "token_uri": token_uri,
    }
    return json.dumps(account, indent=2) + "\n"
