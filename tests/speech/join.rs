//! Strings of recordings, and their batches.

use burn::tensor::Device;
use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::acoustic_model::{AcousticModel, CLASSES, FRAMES_PER_STEP};
use crate::batches::{BATCH_SIZE, BLANK, batch, by_length, shuffled};
use crate::corpus::{Recording, SYMBOLS};
use crate::log_mel::{LogMel, samples};
use crate::support::{numbers, values};
use crate::tones;
use crate::utterance::{LENGTHS, Utterance, strings};

fn recordings() -> Vec<Recording> {
    let recording = |index: usize| Recording {
        symbol: index % SYMBOLS,
        samples: numbers(index as u64, 1500 + 100 * index),
    };
    (0..30).map(recording).collect()
}

#[test]
fn a_string_is_its_recordings_louder_or_softer_with_silence_around() {
    let recordings = recordings();
    let parts: Vec<&Recording> = [4, 14, 7].map(|index| &recordings[index]).to_vec();
    let joined = Utterance::join(&parts, &mut StdRng::seed_from_u64(1));
    assert_eq!(joined.symbols, [4, 4, 7]);
    let mut end = 0;
    for (span, part) in joined.spans.iter().zip(&parts) {
        // 50 to 300 ms.
        assert!((400..=2400).contains(&(span.start - end)), "{span:?}");
        let silence = &joined.samples[end..span.start];
        assert!(silence.iter().all(|sample| sample.abs() < 3.2e-3));
        assert!(silence.iter().any(|sample| *sample != 0.0));
        let level = joined.samples[span.start] / part.samples[0];
        // −10 to 6 dB.
        assert!((0.31..2.0).contains(&level), "{level}");
        let heard = &joined.samples[span.clone()];
        assert_eq!(heard.len(), part.samples.len());
        for (heard, sample) in heard.iter().zip(&part.samples) {
            assert!((heard - level * sample).abs() < 1e-5);
        }
        end = span.end;
    }
    assert!((400..=2400).contains(&(joined.samples.len() - end)));
}

#[test]
fn levels_and_silences_vary() {
    let recordings = recordings();
    let joined = |seed| Utterance::join(&[&recordings[0]], &mut StdRng::seed_from_u64(seed));
    assert_eq!(joined(1), joined(1));
    let [one, other] = [1, 2].map(joined);
    assert_ne!(one.spans, other.spans);
    assert_ne!(
        one.samples[one.spans[0].start],
        other.samples[other.spans[0].start]
    );
}

#[test]
fn each_recording_is_heard_once() {
    let recordings = recordings();
    let all = strings(&recordings, LENGTHS, 3);
    assert!(all.iter().all(|one| LENGTHS.contains(&one.symbols.len())));
    let mut lengths: Vec<usize> = all
        .iter()
        .flat_map(|one| one.spans.iter().map(|span| span.len()))
        .collect();
    lengths.sort();
    // Every recording has a length of its own.
    let expected: Vec<usize> = recordings.iter().map(|one| one.samples.len()).collect();
    assert_eq!(lengths, expected);
    assert_eq!(all, strings(&recordings, LENGTHS, 3));
    assert_ne!(all, strings(&recordings, LENGTHS, 4));
}

#[test]
fn padding_goes_on_with_the_same_silence() {
    let recordings = recordings();
    let joined = Utterance::join(&[&recordings[0]], &mut StdRng::seed_from_u64(5));
    let length = joined.samples.len();
    let padded = joined.padded(length + 500);
    assert_eq!(padded[..length], joined.samples);
    assert_eq!(padded.len(), length + 500);
    let loudest = |samples: &[f32]| samples.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    let [before, after] = [&joined.samples[..400], &padded[length..]].map(loudest);
    assert!(after > 0.8 * before && after < 1.25 * before);
    assert_eq!(joined.padded(length + 500), padded);
    assert_eq!(joined.padded(10), joined.samples);
}

#[test]
fn batches_have_all_strings_with_labels_and_lengths() {
    let recordings = recordings();
    let all: Vec<Utterance> = (0..3)
        .flat_map(|seed| strings(&recordings, LENGTHS, seed))
        .collect();
    let (log_mel, device) = (LogMel::new(), Device::flex());
    let mut said = 0;
    let mut count = 0;
    for (spectra, labels, lengths) in shuffled(&all, 7, &log_mel, &device) {
        let [size, _, frames] = spectra.dims();
        assert!(size <= BATCH_SIZE && frames % 32 == 0);
        assert_eq!((labels.dims()[0], lengths.dims()), (size, [size]));
        let longest = labels.dims()[1];
        let labels: Vec<i64> = labels.into_data().iter::<i64>().collect();
        let lengths: Vec<i64> = lengths.into_data().iter::<i64>().collect();
        for (labels, length) in labels.chunks(longest).zip(&lengths) {
            let (classes, filling) = labels.split_at(*length as usize);
            assert!(
                classes
                    .iter()
                    .all(|class| (1..CLASSES as i64).contains(class))
            );
            assert!(filling.iter().all(|class| *class == BLANK as i64));
            said += *length as usize;
        }
        count += size;
    }
    assert_eq!((count, said), (all.len(), 3 * recordings.len()));
}

#[test]
fn a_batch_shows_each_utterance_as_it_is_alone() {
    let recordings = recordings();
    let all = strings(&recordings, LENGTHS, 0);
    let group = by_length(&all).remove(0);
    let (log_mel, device) = (LogMel::new(), Device::flex());
    let (spectra, labels, _) = batch(&group, &log_mel, &device);
    let [_, bands, frames] = spectra.dims();
    let spectra = values(spectra);
    for (index, utterance) in group.iter().enumerate() {
        let alone = log_mel.features(&utterance.padded(samples(frames)));
        assert_eq!(spectra[index * bands * frames..][..bands * frames], alone);
    }
    let first: Vec<i64> = labels.narrow(0, 0, 1).into_data().iter::<i64>().collect();
    let symbols = group[0].symbols.iter().map(|symbol| 1 + *symbol as i64);
    assert!(
        first
            .into_iter()
            .zip(symbols)
            .all(|(label, symbol)| label == symbol)
    );
}

#[test]
fn there_is_a_step_for_each_symbol_and_each_blank_between_equal_ones() {
    let device = Device::flex();
    let model = AcousticModel::new(&device);
    let tones = tones::corpus();
    // The shortest tone, five times.
    let shortest = tones.train.iter().min_by_key(|one| one.samples.len());
    let parts = [shortest.unwrap(); 5];
    for seed in 0..20 {
        let joined = Utterance::join(&parts, &mut StdRng::seed_from_u64(seed));
        let (spectra, ..) = batch(&[&joined], &LogMel::new(), &device);
        let frames = spectra.dims()[2];
        assert!(frames / FRAMES_PER_STEP >= 9);
        if seed == 0 {
            let logits = model.forward(spectra);
            assert_eq!(logits.dims(), [1, frames / FRAMES_PER_STEP, CLASSES]);
        }
    }
}
