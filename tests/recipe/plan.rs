//! Recipes as files and from the builder; what cannot work is refused before anything runs.

use burn_lean::quant::NumberFormat;
use burn_lean::recipe::{
    ComputeDtype, Distillation, Format, Numbers, PruneMethod, PruneStage, QuantizeStage,
    RateSchedule, Recipe, RecipeError, RoundingMethod, TrainStage,
};

const WHOLE: &str = r#"
seed = 7
dtype = "f16"
fallback = "emulate"
checkpoint_steps = 3
export = ["record", "safetensors", "onnx"]

[train]
epochs = 2
learning_rate = 0.01
schedule = "cosine"
warmup = 0.1
max_norm = 1.0
dtype = "f32"

[prune]
method = "chita"
sparsity = 0.9
stages = 4
samples = 100
exclude = ["head"]
tune = { epochs = 1, learning_rate = 0.001, distillation = { temperature = 4.0, weight = 0.5 } }

[[quantize]]
weights = "int4"
block = 32
train = { epochs = 1, learning_rate = 0.001 }

[[quantize]]
activations = "none"
rounding = "gptq"
"#;

fn built() -> Recipe {
    let tune = TrainStage::new(1, 1e-3).with_distillation(Distillation::new(4.0, 0.5));
    Recipe::new()
        .with_seed(7)
        .with_dtype(ComputeDtype::F16)
        .with_fallback(burn_lean::amp::Fallback::Emulate)
        .with_checkpoint_steps(3)
        .with_export(Format::Record)
        .with_export(Format::Safetensors)
        .with_export(Format::Onnx)
        .with_train(
            TrainStage::new(2, 0.01)
                .with_schedule(RateSchedule::Cosine)
                .with_warmup(0.1)
                .with_max_norm(1.0)
                .with_dtype(ComputeDtype::F32),
        )
        .with_prune(
            PruneStage::new(0.9)
                .with_method(PruneMethod::Chita)
                .with_stages(4)
                .with_samples(100)
                .with_exclude("head")
                .with_tune(tune),
        )
        .with_quantize(
            QuantizeStage::new("int4".parse().unwrap(), "uint8".parse().unwrap())
                .with_block(32)
                .with_train(TrainStage::new(1, 1e-3)),
        )
        .with_quantize(
            QuantizeStage::new("int8".parse().unwrap(), "none".parse().unwrap())
                .with_rounding(RoundingMethod::Gptq),
        )
}

#[test]
fn a_file_says_what_the_builder_says() {
    let read = Recipe::from_toml(WHOLE).unwrap();
    assert_eq!(read, built());
    assert_eq!(Recipe::from_json(&read.to_json()).unwrap(), read);
    assert_eq!(Recipe::from_toml(&read.to_toml().unwrap()).unwrap(), read);
    assert_eq!(Recipe::from_toml("").unwrap(), Recipe::new());
}

#[test]
fn files_are_told_apart_by_their_ending() {
    let folder = tempfile::tempdir().unwrap();
    let (toml, json) = (folder.path().join("a.toml"), folder.path().join("a.json"));
    std::fs::write(&toml, WHOLE).unwrap();
    std::fs::write(&json, built().to_json()).unwrap();
    assert_eq!(Recipe::open(&toml).unwrap(), Recipe::open(&json).unwrap());
    let other = folder.path().join("a.yaml");
    std::fs::write(&other, "").unwrap();
    let error = Recipe::open(&other).unwrap_err().to_string();
    assert_says!(error, "a.yaml", ".toml");
    let error = Recipe::open(folder.path().join("gone.toml")).unwrap_err();
    assert_matches!(error, RecipeError::Io { .. });
}

#[test]
fn one_way_to_quantize_may_be_a_table() {
    let one = Recipe::from_toml("[quantize]\nweights = 'int4'").unwrap();
    assert_eq!(
        one,
        Recipe::from_toml("[[quantize]]\nweights = 'int4'").unwrap()
    );
    let error = Recipe::from_toml("[quantize]\nbits = 4").unwrap_err();
    assert_says!(error, "unknown field `bits`");
    let error = Recipe::from_toml("quantize = 4").unwrap_err();
    assert_says!(error, "[[quantize]]");
}

#[test]
fn unknown_fields_are_refused_in_every_table() {
    for text in [
        "sead = 1",
        "[train]\nepochs = 1\nlearning_rate = 0.1\nlr = 1",
        "[prune]\nsparsity = 0.5\nsparcity = 0.5",
        "[prune]\nsparsity = 0.5\ntune = { epochs = 1, learning_rate = 0.1, steps = 2 }",
        "[[quantize]]\nbits = 4",
        "[prune]\nsparsity = 0.5\n[prune.tune]\nepochs = 1\nlearning_rate = 0.1\n\
         distillation = { temperature = 1.0, weight = 0.5, alpha = 1 }",
    ] {
        let error = Recipe::from_toml(text).unwrap_err();
        assert!(
            error.to_string().contains("unknown field"),
            "{text}: {error}"
        );
    }
    for text in [
        "[train]\nepochs = 1",
        "[[quantize]]\nweights = 'int9'",
        "export = ['onyx']",
    ] {
        let error = Recipe::from_toml(text).unwrap_err();
        assert!(
            matches!(error, RecipeError::File { .. }),
            "{text}: {error:?}"
        );
    }
}

/// Of each: the stage and the field that the error must name.
#[test]
fn what_cannot_work_is_refused_with_stage_and_field() {
    let train = "epochs = 1\nlearning_rate = 0.1";
    #[rustfmt::skip] // A case to a line.
    let cases = [
        ("checkpoint_steps = 0", "recipe", "checkpoint_steps"),
        ("[train]\nepochs = 0\nlearning_rate = 0.1", "train", "epochs"),
        ("[train]\nepochs = 1\nlearning_rate = 0.0", "train", "learning_rate"),
        ("[train]\nepochs = 1\nlearning_rate = inf", "train", "learning_rate"),
        ("[train]\nepochs = 1\nlearning_rate = nan", "train", "learning_rate"),
        (&format!("[train]\n{train}\nwarmup = 1.5"), "train", "warmup"),
        (&format!("[train]\n{train}\nmax_norm = -1.0"), "train", "max_norm"),
        (&format!("[train]\n{train}\ndistillation = {{ temperature = 1.0, weight = 0.5 }}"), "train", "distillation"),
        (&format!("[prune]\nsparsity = 0.5\n[prune.tune]\n{train}\ndistillation = {{ temperature = 0.0, weight = 0.5 }}"), "prune.tune.distillation", "temperature"),
        (&format!("[prune]\nsparsity = 0.5\n[prune.tune]\n{train}\ndistillation = {{ temperature = 1.0, weight = 1.5 }}"), "prune.tune.distillation", "weight"),
        ("[prune]\nsparsity = 0.0", "prune", "sparsity"),
        ("[prune]\nsparsity = 1.0", "prune", "sparsity"),
        ("[prune]\nsparsity = '4:4'", "prune", "sparsity"),
        ("[prune]\nsparsity = '0:4'", "prune", "sparsity"),
        ("[prune]\nsparsity = '2:4'\nmethod = 'chita'\nstages = 2", "prune", "sparsity"),
        ("[prune]\nsparsity = 0.5\nmethod = 'chita'\noutputs = 'values'", "prune", "outputs"),
        ("[prune]\nsparsity = 0.5\nstages = 3", "prune", "stages"),
        ("[prune]\nsparsity = 0.5\nsamples = 3", "prune", "samples"),
        ("[prune]\nsparsity = 0.5\nmethod = 'chita'\nsamples = 0", "prune", "samples"),
        ("[prune]\nsparsity = 0.5\nmethod = 'chita'\nbase = 0.2", "prune", "base"),
        ("[prune]\nsparsity = 0.5\nmethod = 'chita'\nstages = 2\nbase = 0.7", "prune", "base"),
        ("[prune]\nsparsity = 0.5\nstage_epochs = 1", "prune", "stage_epochs"),
        (&format!("[prune]\nsparsity = 0.5\nmethod = 'gradual'\nstages = 1\nstage_epochs = 1\n[prune.tune]\n{train}\nschedule = 'cosine'"), "prune", "stage_epochs"),
        ("[prune]\nsparsity = 0.5\nmethod = 'gradual'", "prune", "tune"),
        ("[prune]\nsparsity = 0.5\nexclude = ['']", "prune", "exclude"),
        ("[[quantize]]\n[[quantize]]\nblock = 0\nweights = 'int4'", "quantize[1]", "block"),
        ("[[quantize]]\nexclude = ['*']", "quantize[0]", "exclude"),
        ("[[quantize]]\nweights = 'uint8'", "quantize[0]", "weights"),
        ("[[quantize]]\nweights = 'none'", "quantize[0]", "weights"),
        ("[[quantize]]\ncalibration = 0", "quantize[0]", "calibration"),
        ("[[quantize]]\nweights = 'e4m3'\nrounding = 'gptq'", "quantize[0]", "rounding"),
        ("[[quantize]]\nrounding = 'gptq'\nsamples = 100", "quantize[0]", "samples"),
        ("[[quantize]]\nrounding = 'fisher'\nsamples = 0", "quantize[0]", "samples"),
        ("[[quantize]]\nweights = 'e2m1'\nrounding = 'fisher'", "quantize[0]", "rounding"),
        (&format!("[[quantize]]\nrounding = 'gptq'\n[quantize.train]\n{train}"), "quantize[0]", "rounding"),
        (&format!("[[quantize]]\ncalibration = 4\n[quantize.train]\n{train}"), "quantize[0]", "calibration"),
        ("[[quantize]]\nactivations = 'none'\ncalibration = 4", "quantize[0]", "calibration"),
        ("[[quantize]]\nweights = 'int4'\nactivations = 'none'\nrounding = 'fisher'\ncalibration = 4", "quantize[0]", "calibration"),
        ("[[quantize]]\n[[quantize]]", "recipe", "quantize"),
    ];
    for (text, stage, field) in cases {
        let with_table = Recipe::from_toml_with::<()>(text, "task").map(|(recipe, ())| recipe);
        for read in [Recipe::from_toml(text), with_table] {
            match read.unwrap_err() {
                RecipeError::Invalid {
                    stage: found,
                    field: at,
                    ..
                } => assert_eq!((found.as_str(), at), (stage, field), "{text}"),
                other => panic!("{text}: {other:?}"),
            }
        }
    }
}

/// For ranges, and for weights that are rounded by data.
#[test]
fn calibration_is_accepted_where_something_is_calibrated() {
    for rest in [
        "",
        "weights = 'e4m3'",
        "activations = 'none'\nweights = 'int4'",
        "activations = 'none'\nrounding = 'gptq'",
        "activations = 'none'\nrounding = 'adaround'",
    ] {
        let recipe = Recipe::from_toml(&format!("[[quantize]]\ncalibration = 4\n{rest}")).unwrap();
        assert_eq!(recipe.quantize[0].calibration, Some(4), "{rest}");
    }
}

/// The files that the example comes with, with its own table beside the recipe.
#[test]
fn the_recipes_of_the_example_are_valid() {
    let folder = crate::support::checkout().join("examples/recipe");
    let mut names = Vec::new();
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        if path
            .extension()
            .is_some_and(|extension| extension == "toml")
        {
            let (recipe, table) = Recipe::open_with::<serde_json::Value>(&path, "task").unwrap();
            assert!(
                (recipe.prune.is_some() || recipe.shrink.is_some()) && table["network"].is_string()
            );
            // Without the table it is no recipe that is read by itself.
            let error = Recipe::open(&path).unwrap_err();
            assert_matches!(error, RecipeError::File { .. });
            assert_says!(error, "`task`");
            names.push(path.file_stem().unwrap().to_owned());
        }
    }
    names.sort();
    assert_eq!(names, ["digits", "mnist", "resnet20", "resnet20_small"]);
}

#[test]
fn numbers_are_parsed_and_others_refused_by_name() {
    for name in ["int2", "int8", "uint4", "e4m3", "e5m2", "e2m1", "none"] {
        assert_eq!(name.parse::<Numbers>().unwrap().to_string(), name);
    }
    let narrow = Numbers::new(NumberFormat::int(4).narrow());
    assert_eq!(narrow, narrow.to_string().parse().unwrap());
    for name in ["int1", "int9", "int04", "int+4", "uint", "fp8", ""] {
        let error = name.parse::<Numbers>().unwrap_err();
        assert!(
            matches!(&error, RecipeError::Numbers { text } if text == name),
            "{error}"
        );
    }
    // A file says where.
    let error = Recipe::from_toml("[[quantize]]\nweights = \"int9\"").unwrap_err();
    assert_says!(error, "`int9` is no number format");
}
