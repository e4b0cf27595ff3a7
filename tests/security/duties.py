"""Published faults of servers like this one, and what we owe for each: a test by its name, or why there is none yet.

A row is (ids, reason). The first id of a row without a reason is in the name of at least one test. A row with a reason
is about something that does not exist here; `test_security_duties` looks whether that is still so (`ABSENT`).
"""

_MEDIA = "no images, audio or video are read"
_TENSORS = "no tensors come with a request"
_PEERS = "no process talks to another one"
_LORA = "no adapters are loaded"
_DERENDER = "no route makes answers of token ids alone but /detokenize"
_TRAINING = "no route changes weights"

DUTIES = (
    # Code, and what is made of bytes
    (("CVE-2025-24357", "GHSA-ggpf-24jw-3fcw"), None),
    (("CVE-2024-9052", "CVE-2024-9053", "CVE-2024-11041", "CVE-2025-29783", "CVE-2025-32444"), None),
    (("CVE-2026-3059", "CVE-2026-3060", "CVE-2026-14890", "CVE-2026-93034", "CVE-2025-30165"), None),
    (("CVE-2025-47277", "CVE-2025-30202"), None),
    (("CVE-2025-62164", "CVE-2026-56340", "CVE-2026-55514"), None),
    (("CVE-2025-62372", "CVE-2026-105754"), _TENSORS),
    (("CVE-2025-66448", "CVE-2026-22807"), None),
    (("CVE-2026-27893", "CVE-2026-46432"), None),
    (("CVE-2026-41523",), None),
    (("CVE-2026-47155",), None),
    (("CVE-2025-9141",), None),
    (("CVE-2026-22778", "CVE-2026-54236"), None),
    (("CVE-2026-5760", "CVE-2024-34359"), None),
    (("CVE-2026-86793", "CVE-2026-15969", "CVE-2026-15976"), _TRAINING),
    (("CVE-2026-7304",), None),
    # Model files
    (("CVE-2024-23605", "CVE-2024-21802", "CVE-2024-21825", "CVE-2024-21836", "CVE-2024-23496"), None),
    (("CVE-2025-53630", "CVE-2026-27940", "CVE-2026-33298"), None),
    (("POC-GGUF-ALIGNMENT",), None),
    (("POC-GGUF-VOCABULARY",), None),
    (("POC-GGUF-NESTED-ARRAYS",), None),
    (("POC-TEMPLATE-NESTED",), None),
    (("CVE-2026-7482",), None),
    (("CVE-2025-66959", "CVE-2025-66960", "CVE-2024-12055", "GO-2025-3559", "GO-2025-3689", "CVE-2025-0317"), None),
    (("CVE-2026-43629",), None),
    (("CVE-2026-137567", "CVE-2026-118375", "CVE-2026-34159", "CVE-2024-42477"), _PEERS),
    (("CVE-2024-37032", "CVE-2024-45436", "CVE-2026-119979"), None),
    (("GO-2025-3824", "CVE-2025-51471"), None),
    # One request that takes the server down
    (("CVE-2026-34756",), None),
    (("CVE-2026-73559",), None),
    (("CVE-2024-8768",), None),
    (("CVE-2025-48956",), None),
    (("CVE-2025-48943", "CVE-2025-48942", "PYSEC-2025-54", "GHSA-vrq3-r879-7m65"), None),
    (("CVE-2026-105757",), None),
    (("CVE-2026-55574", "PYSEC-2026-3933"), None),
    (("CVE-2025-29770", "GHSA-hf3c-wxg2-49q9"), None),
    (("CVE-2025-71379",), None),
    (("CVE-2025-46560",), _MEDIA),
    (("CVE-2025-61620", "CVE-2025-62426"), None),
    (("CVE-2026-115911", "CVE-2026-115918"), None),
    (("CVE-2026-54234",), None),
    (("CVE-2026-114051",), None),
    (("PYSEC-2026-4000",), None),
    (("CVE-2026-71486",), _DERENDER),
    (("CVE-2026-114052",), None),
    (("CVE-2026-105758", "CVE-2026-105760"), None),
    (("CVE-2026-22773", "CVE-2025-15514"), _MEDIA),
    (("CVE-2026-9540",), None),
    (("CVE-2026-21869",), None),
    (("CVE-2026-107183",), None),
    (("GO-2025-3548", "GO-2025-3557"), None),
    (("PR-51447", "PR-51891", "PR-51892", "PR-51898"), None),
    (("PR-51896", "PR-51900", "PR-51997", "PR-52119", "PR-52126"), _MEDIA),
    # Who may ask, what leaves, and what one user learns of another
    (("CVE-2026-48746",), None),
    (("CVE-2025-59425",), None),
    (("DESIGN-DENY-BY-DEFAULT",), None),
    (("CVE-2025-6242", "CVE-2026-24779", "CVE-2026-33626", "CVE-2026-63764"), None),
    (("CVE-2025-25183",), None),
    (("CVE-2025-46722", "PYSEC-2025-43"), _MEDIA),
    (("CVE-2025-46570",), None),
    (("GHSA-v97p-wpxp-px84",), None),
    (("GHSA-fpch-3xrf-7q96",), None),
    (("GO-2025-4251",), None),
    (("GO-2025-3582", "GO-2025-3695", "CVE-2025-0312", "CVE-2025-1975"), None),
    (("CVE-2026-112403", "CVE-2026-96636", "CVE-2026-96637", "CVE-2026-40192", "CVE-2026-42311"), _MEDIA),
    (("CVE-2026-54233", "CVE-2026-55646", "CVE-2026-116175", "CVE-2026-109311", "CVE-2026-100650"), _MEDIA),
)

# Reason -> fields and routes that would be there if it were no longer so; None: looked for in the sources.
ABSENT = {
    _MEDIA: ("/v1/audio/transcriptions", "mm_processor_kwargs"),
    _TENSORS: (None, "prompt_embeds"),
    _PEERS: (None, "ec_transfer_params"),
    _LORA: ("/v1/load_lora_adapter", None),
    _DERENDER: ("/v1/chat/completions/derender", None),
    _TRAINING: ("/update_weights", None),
}
