//! The figure of an alignment.

use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::acoustic_model::CLASSES;
use crate::alignment_figure::{to_show, write};
use crate::corpus::Recording;
use crate::utterance::Utterance;

fn saying(symbols: &[usize]) -> Utterance {
    let recordings: Vec<Recording> = symbols
        .iter()
        .map(|symbol| Recording {
            symbol: *symbol,
            samples: vec![0.5; 2000],
        })
        .collect();
    let recordings: Vec<&Recording> = recordings.iter().collect();
    Utterance::join(&recordings, &mut StdRng::seed_from_u64(1))
}

#[test]
fn the_figure_has_what_is_said_and_names_what_is_likely() {
    let utterance = saying(&[3, 3]);
    let mut probabilities = vec![0.01; 30 * CLASSES];
    for step in probabilities.chunks_mut(CLASSES) {
        step[0] = 0.9;
    }
    probabilities[5 * CLASSES + 4] = 0.8;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("alignment.svg");
    write(&path, &utterance, &probabilities).unwrap();
    let svg = std::fs::read_to_string(&path).unwrap();
    for text in ["Alignment of “33”", "blank", "“3”", "time [s]", "</svg>"] {
        assert!(svg.contains(text), "{text} is missing");
    }
    // Nobody said 7.
    assert!(!svg.contains("“7”"));
    let missing = dir.path().join("no folder/alignment.svg");
    let error = write(&missing, &utterance, &probabilities).unwrap_err();
    assert_says!(error, "alignment.svg");
}

#[test]
fn a_string_with_a_repeat_is_shown_where_there_is_one() {
    let [long, repeating, short] = [&[1, 2, 3, 4, 5][..], &[6, 7, 7], &[8]].map(saying);
    let all = [long.clone(), repeating.clone(), short];
    assert_eq!(to_show(&all).unwrap().symbols, repeating.symbols);
    assert_eq!(to_show(&all[..1]).unwrap().symbols, long.symbols);
    assert!(to_show(&[]).is_none());
}
