//! From classes to symbols, and how many are wrong.

use burn::tensor::{Device, Tensor};

use crate::decoding::{CharacterErrors, collapse, edit_distance, greedy};

#[test]
fn repeats_become_one_before_the_blanks_go() {
    assert_eq!(collapse(&[]), [0; 0]);
    assert_eq!(collapse(&[0, 0, 0]), [0; 0]);
    assert_eq!(collapse(&[1, 1, 1]), [0]);
    assert_eq!(collapse(&[0, 3, 3, 0, 3, 5, 5, 0]), [2, 2, 4]);
    assert_eq!(collapse(&[7, 7, 7, 0, 0, 7]), [6, 6]);
}

#[test]
fn the_likeliest_class_of_each_step_is_taken() {
    let device = Device::flex();
    // Two utterances of four steps and three classes.
    let path = [[0, 1, 1, 0], [2, 0, 2, 1]];
    let mut logits = vec![-1.0f32; 24];
    for (row, classes) in path.iter().enumerate() {
        for (step, class) in classes.iter().enumerate() {
            logits[row * 12 + step * 3 + class] = 0.5;
        }
    }
    let logits = Tensor::<1>::from_floats(logits.as_slice(), &device).reshape([2, 4, 3]);
    assert_eq!(greedy(logits), [vec![0], vec![1, 1, 0]]);
}

/// The definition: what the last symbol costs, and the rest.
fn by_definition(a: &[usize], b: &[usize]) -> usize {
    match (a.split_last(), b.split_last()) {
        (None, _) => b.len(),
        (_, None) => a.len(),
        (Some((x, a_rest)), Some((y, b_rest))) => {
            let replaced = by_definition(a_rest, b_rest) + usize::from(x != y);
            let deleted = 1 + by_definition(a_rest, b);
            let inserted = 1 + by_definition(a, b_rest);
            replaced.min(deleted).min(inserted)
        }
    }
}

/// All strings of up to `longest` symbols out of 0 and 1.
fn all(longest: u32) -> Vec<Vec<usize>> {
    let of = |length: u32| {
        (0..1_usize << length).map(move |bits| (0..length).map(|at| bits >> at & 1).collect())
    };
    (0..=longest).flat_map(of).collect()
}

#[test]
fn edit_distances_are_those_of_the_definition() {
    let strings = all(4);
    for a in &strings {
        for b in &strings {
            assert_eq!(edit_distance(a, b), by_definition(a, b), "{a:?} {b:?}");
        }
    }
    let symbols = |text: &str| -> Vec<usize> { text.bytes().map(usize::from).collect() };
    assert_eq!(edit_distance(&symbols("kitten"), &symbols("sitting")), 3);
}

#[test]
fn the_rate_is_over_all_symbols_that_were_said() {
    let mut errors = CharacterErrors::default();
    errors.add(&[1, 2, 3], &[1, 2, 3]);
    errors.add(&[4], &[]);
    errors.add(&[5, 6, 7, 8], &[5, 7, 8, 8, 8]);
    assert_eq!((errors.edits, errors.symbols), (4, 8));
    assert_eq!(errors.rate(), 50.0);
    let mut inserted = CharacterErrors::default();
    inserted.add(&[1], &[2, 2, 2]);
    assert_eq!(inserted.rate(), 300.0);
    assert_eq!(CharacterErrors::default().rate(), 0.0);
}
