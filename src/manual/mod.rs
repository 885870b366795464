//! The manual: one chapter for each task, with programs that run.
//!
//! | chapter | answers |
//! |---|---|
//! | [`amp`] | how do I train in half precision? |
//! | [`quant`] | how do I get to 8 or 4 bits, with training and without? |
//! | [`prune`] | how do I remove weights, and keep them removed? |
//! | [`all_three`] | how do the three share one weight? |
//! | [`learner`] | how does it go into Burn's Learner? |
//! | [`batch_norm`] | what becomes of BatchNorm under each of them? |
//! | [`deploy`] | how does the result leave Burn? |
//! | [`recipe`] | how do I do all of it in one run, which goes on where it was killed? |
//! | [`oneshot`] | how do I compress a language model in one pass? |
//! | [`glossary`] | what does a word mean? |
//!
//! All programs are on the CPU device `flex` and take a second; another device is another
//! [`Device`](burn::tensor::Device). Two ideas carry everything: an extension says what a weight is
//! *worth* in the forward pass (a reparameterization of Burn's, attached by one checked verb, so that
//! the struct, its parameters and checkpoints stay), and a forward pass is *recorded*, so that what
//! happens to the numbers can be said without an edit of the model.
//!
//! Settings go into JSON and back. Those of Burn's `Config` (`QatConfig`, `SolverConfig`, `GradScalerConfig`,
//! `Preset`) are to be written by [`Config::save`](burn::config::Config::save), and edited then: of a file that is
//! written by hand, Burn passes over fields that it does not know, misspelt ones, and reads an option that is
//! missing as `None`, where its default is another, too. Recipes, pruners, schemes and loss scales
//! refuse a field that they do not know.

pub mod all_three;
pub mod amp;
pub mod batch_norm;
pub mod deploy;
pub mod glossary;
pub mod learner;
pub mod oneshot;
pub mod prune;
pub mod quant;
pub mod recipe;
