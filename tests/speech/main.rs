//! The parts of the example `speech_ctc`, and Burn's CTC loss that it trains with.

#[macro_use]
#[path = "../support/mod.rs"]
mod support;

#[allow(dead_code)]
#[path = "../../examples/speech_ctc/acoustic_model.rs"]
mod acoustic_model;
#[allow(dead_code)]
#[path = "../../examples/speech_ctc/alignment_figure.rs"]
mod alignment_figure;
#[allow(dead_code)]
#[path = "../../examples/speech_ctc/batches.rs"]
mod batches;
#[allow(dead_code)]
#[path = "../../examples/speech_ctc/corpus.rs"]
mod corpus;
#[allow(dead_code)]
#[path = "../../examples/speech_ctc/decoding.rs"]
mod decoding;
#[allow(dead_code)]
#[path = "../../examples/speech_ctc/log_mel.rs"]
mod log_mel;
#[allow(dead_code)]
#[path = "../../examples/speech_ctc/speech_error.rs"]
mod speech_error;
#[allow(dead_code)]
#[path = "../../examples/speech_ctc/tones.rs"]
mod tones;
#[allow(dead_code)]
#[path = "../../examples/speech_ctc/utterance.rs"]
mod utterance;

mod ctc;
mod decode;
mod figure;
mod join;
mod spectra;
mod wav;
