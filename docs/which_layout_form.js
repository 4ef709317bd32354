// The form of which_layout.md: options and answers are those of which_layout.js.
const selects = [...document.querySelectorAll("#questions select")];
const answer = document.getElementById("answer");

function line(tag, text) {
  const node = document.createElement(tag);
  node.textContent = text;
  return node;
}

function show() {
  const places = selects.map((select) => select.selectedIndex);
  const found = ANSWERS[places.join("-")];
  if (!found) {
    const words = places.map((place, question) => WORDS[question][place]).filter(Boolean);
    const asked = document.createElement("pre");
    asked.append(line("code", `hf-parallel plan ${words.join(" ")}`));
    answer.replaceChildren(line("p", "No answer is stored for this combination. In a minute you have it by:"), asked);
    return;
  }
  if (!found.spec) {
    answer.replaceChildren(line("p", "Nothing fits: " + found.advice));
    return;
  }
  const command = `--parallel ${found.spec} … --per_device_train_batch_size ${found.rows} --gradient_accumulation_steps ${found.calls}`;
  const figures = `${found.tokens.toLocaleString("en")} tokens per second on each GPU and ${found.gib} GiB on the fullest one, by prediction.`;
  const code = document.createElement("pre");
  code.append(line("code", command));
  const reasons = document.createElement("ul");
  reasons.append(...found.why.map((reason) => line("li", reason)));
  answer.replaceChildren(code, line("p", figures), ...(found.why.length ? [line("p", "Why not another layout?"), reasons] : []));
}

OPTIONS.forEach((options, index) => {
  selects[index].append(...options.map((option) => line("option", option)));
  selects[index].addEventListener("change", show);
});
selects[0].selectedIndex = 1;
selects[2].selectedIndex = 2;
selects[3].selectedIndex = 1;
show();
