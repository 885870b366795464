#![no_main]

#[allow(dead_code)]
#[path = "../../tests/endurance/parsers.rs"]
mod parsers;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = parsers::compressed_tensors(bytes);
});
