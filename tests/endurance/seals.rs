//! Damaged files with the checksums that they should have: so that what reads them is reached.

/// A safetensors file with a checksum of eight hexadecimal digits in its metadata.
pub(crate) fn safetensors(bytes: &[u8]) -> Vec<u8> {
    const PLACE: &[u8] = b"\"crc32\":\"";
    let mut bytes = bytes.to_vec();
    let at = bytes.windows(PLACE.len()).position(|part| part == PLACE);
    let Some(digits) = at.map(|at| at + PLACE.len()..at + PLACE.len() + 8) else {
        return bytes;
    };
    if bytes.len() >= digits.end {
        bytes[digits.clone()].fill(b'0');
        let checksum = format!("{:08x}", crc32(&bytes));
        bytes[digits].copy_from_slice(checksum.as_bytes());
    }
    bytes
}

/// `stage.toml` of a recipe, beside the record of its model.
pub(crate) fn stage(bytes: &[u8], model: &[u8]) -> Vec<u8> {
    let text = String::from_utf8_lossy(bytes);
    let Some((head, kept)) = text.split_once("[kept]\n") else {
        return bytes.to_vec();
    };
    // As it is written by itself.
    let kept_crc32 = crc32(kept.replace("[kept.", "[").as_bytes());
    let said = [
        ("kept_crc32", kept_crc32 as usize),
        ("model_bytes", model.len()),
        ("model_crc32", crc32(model) as usize),
    ];
    let lines = head.lines().map(|line| {
        let mut names = said.iter();
        let named = names.find(|(name, _)| line.starts_with(name));
        named.map_or(line.into(), |(name, value)| format!("{name} = {value}"))
    });
    let head: Vec<String> = lines.collect();
    format!("{}\n[kept]\n{kept}", head.join("\n")).into_bytes()
}

/// The bytes of a sparse record with the length and the checksum that they should have.
pub(crate) fn record(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let length = bytes.len() as u64;
    if let Some(place) = bytes.get_mut(12..20) {
        place.copy_from_slice(&length.to_le_bytes());
    }
    if let Some(content) = bytes.len().checked_sub(4) {
        let checksum = crc32(&bytes[..content]);
        bytes[content..].copy_from_slice(&checksum.to_le_bytes());
    }
    bytes
}

pub(crate) fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = flate2::Crc::new();
    crc.update(bytes);
    crc.sum()
}
