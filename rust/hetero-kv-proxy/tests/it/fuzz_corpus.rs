//! Each file of the fuzzer's corpus, once; what the fuzzer finds is added there.

use std::fs;
use std::path::Path;

#[path = "../../fuzz/targets.rs"]
mod targets;

#[test]
fn the_corpus_of_the_fuzzer_holds() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
    for (name, target) in targets::ALL {
        let mut files = 0;
        for entry in fs::read_dir(corpus.join(name)).expect("a folder for each target") {
            let path = entry.expect("readable").path();
            // Said before, so that a panic has a name.
            println!("{}", path.display());
            target(&fs::read(&path).expect("readable"));
            files += 1;
        }
        assert!(files >= 5, "{name} has {files} files");
    }
}
