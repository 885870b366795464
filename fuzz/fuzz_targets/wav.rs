#![no_main]

#[allow(dead_code)]
#[path = "../../examples/speech_ctc/corpus.rs"]
mod corpus;
#[allow(dead_code)]
#[path = "../../examples/speech_ctc/log_mel.rs"]
mod log_mel;
#[allow(dead_code)]
#[path = "../../examples/speech_ctc/speech_error.rs"]
mod speech_error;
#[allow(dead_code)]
#[path = "../../examples/speech_ctc/tones.rs"]
mod tones;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = corpus::parse_wav(std::path::Path::new("fuzz.wav"), bytes);
});
