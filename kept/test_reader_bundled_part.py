# ------------------------------------------------------------------------------------------------- the bundled readers


@pytest.fixture(scope="module")
def scores() -> dict[str, quality.QuestionQuality]:
    found = {}
    for name in (READER, PRUNED):
        model, tokenizer = load_bert(name)
        answer = answerer(tokenizer, torch_run(model), threshold=threshold_of(model))
        found[name] = quality.evaluate(answer, names=["questions"]).questions
    return found


@pytest.mark.parametrize("name", [READER, PRUNED])
def test_a_bundled_reader_is_small_and_its_card_says_what_it_scores(name: str, scores) -> None:
    folder = data_folder() / name
    card, found = (folder / "README.md").read_text(encoding="utf-8"), scores[name]
    assert (folder / "model.safetensors").stat().st_size <= 8e6
    for score in (found.all.f1, found.seen.f1, found.unseen.f1, found.no_answer.exact_match):
        assert f" {score:.1f} |" in card


def test_the_reader_reads_unseen_stories_and_abstains(scores) -> None:
    assert scores[READER].seen.f1 >= 75 and scores[READER].no_answer.exact_match >= 80


def test_the_bundled_reader_loads_plainly(tmp_path: Path) -> None:
    from transformers import AutoModelForQuestionAnswering

    plain = AutoModelForQuestionAnswering.from_pretrained(data_folder() / READER, dtype=torch.float32).eval()
    model, tokenizer = load_bert(READER)
    given = {name: np.array(ids) for name, ids in tokenizer(["Who came?"], ["Ann came."]).items()}
    for one, other in zip(torch_run(plain)(given), torch_run(model)(given), strict=True):
        assert np.allclose(one, other, atol=1e-5)
    assert set(given) == {"input_ids", "token_type_ids", "attention_mask"} and widths(model)["heads"] == [4] * 4
